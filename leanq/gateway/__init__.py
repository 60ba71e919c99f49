"""The HTTP gateway: clients that speak HTTP, in front of the queue.

One process is a client of the queue, and serves any number of its own::

    keys.py             who may call: the file of keys
    access.py           the key of one HTTP request, its limits, and where browsers are refused
    limits.py           how many connections there are, and which one gives way
    logs.py             what is logged of callers: changes, and requests
    client.py           requests that bear their tenant, and may be fetched later
    pending.py          those whose end is waited for, and their names
    groups.py           those of one HTTP request, waited for together
    connections.py      work that ends when its HTTP client goes away, or the gateway ends
    kimina.py           the interface of Kimina Lean Server, both generations
    kimina_results.py   what a reply becomes in that interface
    v1.py               leanq's own interface
    v1_models.py        its bodies and results
    operations.py       its bodies as requests to the queue
    batches.py          many of them over one connection, as a stream
    campaigns.py        whole data sets, for campaign workers
    problems.py         its errors
    metrics.py          what it knows of its own work
    bodies.py           what their bodies may hold, before any of it is built
    operation_routes.py the short way to the three operations
    status.py           what a key may know of the fleet
    interface.py        what both interfaces are made of
    recent.py           its latest requests, with their texts
    page/               the fleet in a browser
    app.py              all of it as one ASGI application
    server.py           that application on a port, until it is told to end
"""
