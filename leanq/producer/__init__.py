"""The layer below the clients: it builds requests, sends them, and awaits their replies.

In the order in which to read them::

    arguments.py         checks callers' arguments
    request_builder.py   makes requests of them
    route.py             the path of requests: a waiter for each, a route for all
    shard_client.py      the client of one shard: sends, waits, submits lost requests again
    shard_router.py      the route to one cluster, by request id
    cluster_router.py    the route to several, by weight
    gateway_route.py     the route through an HTTP gateway: batches, sent again after a break
    gateway_url.py       that gateway's URL and key
    recording.py         a route that keeps requests and replies in journals
    route_tasks.py       runs a route's tasks, so that none fails unseen
    future_client.py     operations that return futures
    loop_thread.py       the thread in which they run
    stream.py            checks many texts through one client
    worker_watch.py      warns when no worker is alive
"""
