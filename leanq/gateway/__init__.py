"""The HTTP gateway: it serves HTTP clients in front of the queue.

One process is a client of the queue and serves any number of HTTP clients::

    keys.py             the file of keys: who may call
    access.py           the key and the limits of one HTTP request; refuses some browsers
    limits.py           the most connections, and the share of one key
    logs.py             logs the changes and requests of callers
    client.py           sends requests that bear their tenant and can be fetched later
    pending.py          the requests that the gateway waits for, and their names
    groups.py           waits for the requests of one HTTP request together
    connections.py      ends work when its client goes away, is slow, or the gateway ends
    kimina.py           the interfaces of Kimina Lean Server 1.x and 2.x
    kimina_results.py   turns replies into results of that interface
    v1.py               leanq's own interface
    v1_bodies.py        its bodies and results
    operations.py       turns its bodies into requests to the queue
    batches.py          streams many requests over one connection
    problems.py         its errors
    metrics.py          counts the gateway's own work, and traces it
    bodies.py           reads bodies as records, and describes these
    operation_routes.py a short way to the handlers of the three operations
    fresh.py            looks at the queue at most once a second
    interface.py        the parts that both interfaces share
    recent.py           keeps the latest requests with their texts
    page/               the fleet in a browser
    app.py              the ASGI application
    server.py           serves that application on a port
"""
