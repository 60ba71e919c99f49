#!lua flags=allow-oom
-- notify_worker: ends a worker's own wait for a wake-up; an empty request id stops nothing.
-- ARGV: worker
return call('RPUSH', P .. ':stop:' .. ARGV[1], '')
