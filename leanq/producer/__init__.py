"""What stands below the clients: requests built, sent, and their replies awaited.

In the order in which to read them::

    arguments.py         arguments of callers, checked
    request_builder.py   requests made of them
    route.py             what requests pass through: a waiter for each, a route for all
    shard_client.py      the client of one shard: sends, waits, submits again what was lost
    shard_router.py      the route to one cluster, by request id
    cluster_router.py    the route to several, by weight
    gateway_route.py     the route through an HTTP gateway: batches, sent again where one breaks
    gateway_url.py       that gateway's URL and key
    recording.py         a route that keeps what was asked and answered, in journals
    route_tasks.py       a route's tasks, of which none fails unseen
    future_client.py     operations that return futures
    loop_thread.py       the thread in which they run
    stream.py            many texts through one client
    worker_watch.py      says so when no worker is alive
"""
