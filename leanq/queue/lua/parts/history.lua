-- parts: clock
-- Once a minute, the call that comes first notes the totals so far, so that history outlives the fleet.
-- What waits and who works is as of that moment; the histograms are left out.
local function note_minute()
  local minute = math.floor(now / 60000)
  if minute <= tonumber(redis.call('HGET', tag .. ':stats', 'minute') or 0) then return end
  redis.call('HSET', tag .. ':stats', 'minute', minute)
  local totals, all = {}, redis.call('HGETALL', tag .. ':stats')
  for i = 1, #all, 2 do
    local name = all[i]
    if string.match(name, '^[sf]:') or string.match(name, '^%a_ms:') or string.match(name, '^waiting:') then
      totals[name] = tonumber(all[i + 1])
    end
  end
  totals.workers = redis.call('ZCARD', tag .. ':workers')
  redis.call('ZADD', tag .. ':minutes', minute, cmsgpack.pack({minute, totals}))
  -- A day of history, and an hour more.
  redis.call('ZREMRANGEBYRANK', tag .. ':minutes', 0, -1 - 1500)
end
