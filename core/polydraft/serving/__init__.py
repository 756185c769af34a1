"""The OpenAI-compatible server (extra `serve`): routes in one process, the engine in another, plain records between them.

`polydraft serve` starts it. It never imports an engine into the process that talks to clients, never unpickles, and never
lets a client keep the engine waiting.
"""
