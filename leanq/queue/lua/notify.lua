#!lua flags=allow-oom
-- parts: wait_list wakeup
-- notify: passes a wake-up's token on to the next idle worker, unless the environment was paused meanwhile.
-- Allows oom, since only workers drain a full memory.
if not wait_list.is_paused('e', environment) then notify(environment, 1) end
return 1
