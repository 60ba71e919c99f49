-- parts: clock
-- arguments: lease_ms
-- Returns when leases may be judged again (ms). If the server was away or its clock has jumped, no worker
-- was heard for half a lease. Then leases expire through no fault of the workers, so all get another half
-- to be heard first. A call that looks at leases counts as heard. If the clock went back, earlier leases
-- would outlast their workers by as much, so they are shortened by it.
local function grace_ends()
  local heard, ends = unpack(redis.call('HMGET', tag .. ':stats', 'heard', 'expiry_grace'))
  ends = tonumber(ends or 0)
  local silent_ms = now - tonumber(heard or now)
  if math.abs(silent_ms) > lease_ms / 2 then
    ends = now + math.floor(lease_ms / 2)
    redis.call('HSET', tag .. ':stats', 'expiry_grace', ends)
    if silent_ms < 0 then
      -- No lease given by the new clock ends so late.
      local workers = tag .. ':workers'
      for _, name in ipairs(redis.call('ZRANGEBYSCORE', workers, '(' .. (now + lease_ms), '+inf')) do
        redis.call('ZINCRBY', workers, silent_ms, name)
      end
    end
  end
  redis.call('HSET', tag .. ':stats', 'heard', now)
  return ends
end
