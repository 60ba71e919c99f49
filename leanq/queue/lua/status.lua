#!lua flags=no-writes
-- status: one look at the shard; changes nothing.
-- Returns {now (ms), counters, environments, {worker, lease (ms left), requests held, what it says}*,
--   {environment, priority, tenants, waiting of the first 1,000 tenants, age of the oldest (ms),
--    how many of these their operators hold back}*,
--   {environment, quarantined}*, dead letters, tallies by environment, what is held back and since when (ms),
--   the scaler's decisions by environment}
local now = now_ms()
local workers, priorities, quarantined = {}, {}, {}
local leases = call('ZRANGE', P .. ':workers', 0, -1, 'WITHSCORES')
for i = 1, #leases, 2 do
  local worker = leases[i]
  workers[#workers + 1] = {worker, leases[i + 1] - now, call('ZCARD', P .. ':work:' .. worker),
    call('HGET', P .. ':info', worker) or ''}
end
local stats = call('HGETALL', STATS)
for i = 1, #stats, 2 do
  local environment = string.match(stats[i], '^waiting:(.*)$')
  if environment then
    for priority = 0, PRIORITIES - 1 do
      local ring = P .. ':ring:' .. environment .. ':' .. priority
      local tenants = call('LRANGE', ring, 0, 999)
      local parked = call('SMEMBERS', P .. ':parked:' .. environment .. ':' .. priority)
      local waiting, held, oldest = 0, 0, now
      for i = 1, #tenants + #parked do
        local tenant = tenants[i] or parked[i - #tenants]
        local wait = P .. ':wait:' .. environment .. ':' .. priority .. ':' .. tenant
        local n = call('LLEN', wait)
        waiting = waiting + n
        if i > #tenants then held = held + n end
        local r = record(call('LINDEX', wait, 0))
        if r and i <= #tenants then oldest = math.min(oldest, r[AT]) end
      end
      if #tenants + #parked > 0 then
        priorities[#priorities + 1] = {environment, priority, call('LLEN', ring) + #parked, waiting, now - oldest, held}
      end
    end
    local n = call('LLEN', P .. ':quarantined:' .. environment)
    if n > 0 then quarantined[#quarantined + 1] = {environment, n} end
  end
end
return {now, stats, call('HGETALL', P .. ':environments'), workers, priorities, quarantined,
  call('ZCARD', P .. ':dead'), call('HGETALL', TALLY), call('HGETALL', PAUSED),
  call('HGETALL', P .. ':scaler')}
