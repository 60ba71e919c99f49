#!lua flags=allow-oom
-- notify_worker: ends a worker's own wait for a wake-up; an empty request id stops nothing.
return redis.call('RPUSH', tag .. ':stop:' .. worker, '')
