#!lua flags=allow-oom
-- parts: wakeup
-- notify: passes a wake-up's token on to the next idle worker. Allows oom, since only workers drain a full
-- memory.
notify(environment, 1)
return 1
