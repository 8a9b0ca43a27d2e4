"""The demo's layout, its theme, and a session's step as values of its components."""
