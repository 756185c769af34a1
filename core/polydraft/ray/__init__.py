"""Several engines over several machines, on a cluster of Ray (extra `ray`): `polydraft serve --ray`.

`application.py` makes what Ray Serve runs: ingresses with the server's routes, and replicas of the engine behind a router that
sees prefixes. `docs/ray.md` shows it at work. Nothing else of polydraft imports Ray.
"""
