#!lua flags=allow-oom
-- pause: holds an environment or a tenant back, or lets it go on. What runs goes on.
-- ARGV: 'e' for an environment or 't' for a tenant, its name, 1 to hold back or 0 to go on
-- Returns 1 where that was otherwise before.
local kind, name, hold = ARGV[1], ARGV[2], ARGV[3] == '1'
local field = kind .. ':' .. name
if hold == is_paused(kind, name) then return 0 end
if hold then call('HSET', PAUSED, field, now_ms()) else call('HDEL', PAUSED, field) end

-- Takes a tenant out of a ring, or puts it back at the end where it has a line.
local function move(environment, priority)
  local line = environment .. ':' .. priority
  local ring, parked = P .. ':ring:' .. line, P .. ':parked:' .. line
  if hold then
    if call('LREM', ring, 0, name) > 0 then call('SADD', parked, name) end
  elseif call('SREM', parked, name) == 1
    and call('EXISTS', P .. ':wait:' .. line .. ':' .. name) == 1 then
    call('RPUSH', ring, name)
    notify(environment, 1)
  end
end

if kind == 't' then
  for _, waiting in ipairs(call('HKEYS', STATS)) do
    local environment = string.match(waiting, '^waiting:(.*)$')
    for priority = 0, environment and PRIORITIES - 1 or -1 do move(environment, priority) end
  end
elseif not hold and has_line(name) then
  notify(name, WAKEUP_TOKENS)
end
return 1
