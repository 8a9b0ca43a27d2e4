"""How the demo looks: its layout, its theme, and a session's step as values of its components."""
