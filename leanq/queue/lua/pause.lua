#!lua flags=allow-oom
-- parts: clock wait_list wakeup
-- pause: holds an environment ('e') or a tenant ('t') back, or lets it go on. Running requests go on. What
-- is held back wakes no worker.
-- Returns 1 if that changed anything.
local field = kind .. ':' .. name
if set == wait_list.is_paused(kind, name) then return 0 end
if set then redis.call('HSET', tag .. ':paused', field, now)
else redis.call('HDEL', tag .. ':paused', field) end

-- Takes a tenant out of a ring, or puts it back at the end if it has a list.
local function move(environment, priority)
  local ring_name = environment .. ':' .. priority
  local ring, parked = tag .. ':ring:' .. ring_name, tag .. ':parked:' .. ring_name
  if set then
    if redis.call('LREM', ring, 0, name) > 0 then redis.call('SADD', parked, name) end
  elseif redis.call('SREM', parked, name) == 1
    and redis.call('EXISTS', tag .. ':wait:' .. ring_name .. ':' .. name) == 1 then
    redis.call('RPUSH', ring, name)
    if not wait_list.is_paused('e', environment) then notify(environment, 1) end
  end
end

if kind == 't' then
  for _, counter in ipairs(redis.call('HKEYS', tag .. ':stats')) do
    local environment = string.match(counter, '^waiting:(.*)$')
    for priority = 0, environment and 2 or -1 do move(environment, priority) end
  end
elseif set then
  redis.call('UNLINK', tag .. ':wakeup:' .. name)
elseif wait_list.any(name) then
  notify(name, 16)
end
return 1
