"""Exact mode: from its second turn on, a conversation's prompt is the ids that were sampled plus what is new.

`context` holds a session's sampled turns and answers "which ids go to the engine for this call"; `meaning` and
`branches` find the turn that a request continues; `suffix` proves what the chat template puts after it.
"""
