"""The queue in Redis: requests, replies, leases, and the scripts that move them.

In the order in which to read them::

    requests.py     requests and replies, and the words that they use
    keys.py         every key in Redis
    shard.py        a connection to one shard, what every role may ask it, and the queue's shape
    client_queue.py    calls of a client: submit, cancel, lookup, its inbox
    worker_queue.py    calls of a worker: claim, settle, renew, release
    operator_queue.py  calls of operators: status, pauses, weights, dead letters
    lua/            the scripts: a file each, and the parts that they share
    scripts.py      the arguments of each script, and how its text is put together
    records.py      requests as bytes in Redis
    results.py      the values that go into the transitions and come out of them
    headers.py      which headers texts had
    wire.py         requests and replies as msgpack
    connection.py   a connection to the server, on which calls take turns
    trial.py        every script run once, to know whether a server takes them
    metrics.py      every metric, named once
    settings.py     every setting, declared once
    tasks.py        work that a cancellation must not cut short
    up_file.py      how clients and commands find the queue of ``leanq up``
    ray_cluster.py  how programs inside a Ray cluster find the queue
"""
