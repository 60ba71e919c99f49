#!lua flags=allow-oom
-- poke: ends a worker's own wait for a doorbell; an empty request id stops nothing.
-- ARGV: worker
return call('RPUSH', P .. ':stop:' .. ARGV[1], '')
