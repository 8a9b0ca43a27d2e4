"""The runtime behind HTTP: `app.create_app` makes the application, `server.serve` runs it.

Every request passes `security.SecurityHeaders`, `telemetry.Observer` and `security.Guard`, gets a slot of
`limits.RequestLimiter`, and is answered by `service.FinderService` in a thread. For research, not for diagnosis.
"""
