"""The layer below the clients: it builds requests, sends them, and awaits their replies.

In the order in which to read them::

    arguments.py         checks callers' arguments
    request_builder.py   makes requests of them
    route.py             where they go, and their path: a waiter for each, a route for all
    outstanding.py       the requests whose ends are awaited
    shard_client.py      the client of one shard: sends, waits, submits lost requests again
    shard_router.py      the route to one cluster, which warns when no worker is alive
    cluster_router.py    the route to several, by weight
    gateway_route.py     the route through an HTTP gateway: batches, sent again after a break
    recording.py         a route that keeps requests and replies in journals
    traced_route.py      a route that makes the spans of a client, if traces are asked for
    future_client.py     operations that return futures, and the thread in which they run
    stream.py            checks many texts through one client
"""
