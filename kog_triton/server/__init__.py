"""The OpenAI-compatible server: HTTP in this process, the engine in a supervised child.

    app         routes -> chat, completions, responses, messages -> samples -> supervisor
    supervisor  starts the child, watches that it goes on, starts another one when it ended
    wire        what both processes say to each other, over an inherited pair of sockets
    child       the other process: one LLM, and nothing of HTTP

This process holds no model: it imports no torch, so that a GPU's trouble ends with the child.
"""
