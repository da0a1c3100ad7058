"""The proxy between harnesses and inference: every model call goes through it, and is recorded before it is answered.

A request in a harness's own dialect is parsed into a `ModelCall`, sent to the node's engine with the fields that make
it give up its token ids, gathered into an `Answer`, checked, persisted, and only then rendered back. Dialects and
engines are plug-ins (entry-point groups `polarq.dialects` and `polarq.engines`); nothing here names one.
"""
