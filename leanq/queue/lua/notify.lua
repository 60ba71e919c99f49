#!lua flags=allow-oom
-- ring: passes a wake-up's token on to the next idle worker; a full memory drains only if it may.
-- ARGV: environment
notify(ARGV[1], 1)
return 1
