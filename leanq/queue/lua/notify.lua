#!lua flags=allow-oom
-- parts: wakeup
-- notify: passes a wake-up's token on to the next idle worker; a full memory drains only if it may.
notify(environment, 1)
return 1
