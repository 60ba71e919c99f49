"""The HTTP gateway: clients that speak HTTP, in front of the queue.

One process is a client of the queue, and serves any number of its own::

    keys.py             who may call: the file of keys
    access.py           the key of one HTTP request, and where browsers are refused
    connections.py      work that ends when its HTTP client goes away, or the gateway ends
    kimina.py           the interface of Kimina Lean Server, both generations
    kimina_results.py   what a reply becomes in that interface
    app.py              all of it as one ASGI application
    server.py           that application on a port, until SIGTERM
"""
