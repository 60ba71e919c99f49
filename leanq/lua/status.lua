#!lua flags=no-writes
-- status: one look at the shard; changes nothing.
-- Returns {now (ms), counters, lanes, {worker, lease (ms left), requests held, what it says}*,
--   {lane, level, tenants, waiting of the first 1,000 tenants, age of the oldest (ms)}*,
--   {lane, suspects}*, dead letters, tallies by lane, the scaler's decisions by environment}
local now = now_ms()
local workers, levels, suspects = {}, {}, {}
local leases = call('ZRANGE', P .. ':workers', 0, -1, 'WITHSCORES')
for i = 1, #leases, 2 do
  local worker = leases[i]
  workers[#workers + 1] = {worker, leases[i + 1] - now, call('ZCARD', P .. ':work:' .. worker),
    call('HGET', P .. ':info', worker) or ''}
end
local stats = call('HGETALL', STATS)
for i = 1, #stats, 2 do
  local lane = string.match(stats[i], '^waiting:(.*)$')
  if lane then
    for level = 0, LEVELS - 1 do
      local ring = P .. ':ring:' .. lane .. ':' .. level
      local tenants = call('LRANGE', ring, 0, 999)
      local waiting, oldest = 0, now
      for _, tenant in ipairs(tenants) do
        local wait = P .. ':wait:' .. lane .. ':' .. level .. ':' .. tenant
        waiting = waiting + call('LLEN', wait)
        local r = record(call('LINDEX', wait, 0))
        if r then oldest = math.min(oldest, r[AT]) end
      end
      if #tenants > 0 then
        levels[#levels + 1] = {lane, level, call('LLEN', ring), waiting, now - oldest}
      end
    end
    local n = call('LLEN', P .. ':suspects:' .. lane)
    if n > 0 then suspects[#suspects + 1] = {lane, n} end
  end
end
return {now, stats, call('HGETALL', P .. ':lanes'), workers, levels, suspects,
  call('ZCARD', P .. ':dead'), call('HGETALL', TALLY), call('HGETALL', P .. ':scaler')}
