"""The HTTP shim: Polar's routes with Polar's JSON, so that a trainer written for Polar works unchanged.

Import from the module that owns the idea: `polarq.http.serve` runs it, `polarq.http.app` builds the application.
`polar_shapes`, `polar_json` and `task_body` need no HTTP server library.
"""
