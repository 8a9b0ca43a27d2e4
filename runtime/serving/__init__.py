"""The runtime behind HTTP: `app.create_app` makes the application, `server.serve` runs it.

Every request passes, from the outside in, `security.SecurityHeaders`, `telemetry.Observer`, `security.Guard`, a slot of
`limits.RequestLimiter`, and `service.FinderService`, which answers it in a thread. For research, not for diagnosis.
"""
