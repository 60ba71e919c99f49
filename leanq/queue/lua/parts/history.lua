-- parts: clock bulk
-- Drops the counters of tenants that used no CPU time for a day, to make room for others.
local function forget_tenants(minute, totals)
  local newer = redis.call('ZCOUNT', tag .. ':minutes', '(' .. minute - 1440, '+inf')
  local text = redis.call('ZREVRANGE', tag .. ':minutes', newer, newer)[1]
  local read, note = pcall(cmsgpack.unpack, text)
  -- Any process may have written this text.
  local before = read and type(note) == 'table' and note[2]
  if type(before) ~= 'table' then return end
  local idle = {}
  for name, total in pairs(totals) do
    if string.match(name, '^u:[^:]*:.') and before[name] == total then idle[#idle + 1] = name end
  end
  if #idle == 0 then return end
  bulk.call('HDEL', tag .. ':stats', idle)
  redis.call('HINCRBY', tag .. ':stats', 'tenants', -#idle)
end

-- Once a minute, the call that comes first notes the totals so far, so that history outlives the fleet.
-- Waiting requests and workers are counted at that moment. Of the histograms it notes only the one of the
-- whole time that requests took, some ten numbers for each environment.
local function note_minute()
  local minute = math.floor(now / 60000)
  if minute <= tonumber(redis.call('HGET', tag .. ':stats', 'minute') or 0) then return end
  redis.call('HSET', tag .. ':stats', 'minute', minute)
  local totals, all = {}, redis.call('HGETALL', tag .. ':stats')
  for i = 1, #all, 2 do
    local name = all[i]
    if string.match(name, '^[sfut]:') or string.match(name, '^%a_ms:') or string.match(name, '^waiting:') then
      totals[name] = tonumber(all[i + 1])
    end
  end
  forget_tenants(minute, totals)
  totals.workers = redis.call('ZCARD', tag .. ':workers')
  redis.call('ZADD', tag .. ':minutes', minute, cmsgpack.pack({minute, totals}))
  -- A day of history, and an hour more.
  redis.call('ZREMRANGEBYRANK', tag .. ':minutes', 0, -1 - 1500)
end
