#!lua flags=allow-oom
-- ring: passes a doorbell's token on to the next idle worker; a full memory drains only if it may.
-- ARGV: environment
ring_bell(ARGV[1], 1)
return 1
