-- parts: clock
-- arguments: lease_ms
-- When leases may be judged again (ms). While no worker is heard for half a lease (the server was away,
-- or its clock has jumped) leases expire through no fault of their workers', so all get another half to
-- be heard first. A call that looks at leases is heard. Where the clock went back, leases given before
-- would outlast their workers by as much, so they end that much earlier.
local function grace_ends()
  local heard, ends = unpack(redis.call('HMGET', tag .. ':stats', 'heard', 'expiry_grace'))
  ends = tonumber(ends or 0)
  local silent_ms = now - tonumber(heard or now)
  if math.abs(silent_ms) > lease_ms / 2 then
    ends = now + lease_ms / 2
    redis.call('HSET', tag .. ':stats', 'expiry_grace', ends)
    if silent_ms < 0 then
      -- By the new clock no lease has been given that ends so late.
      local workers = tag .. ':workers'
      for _, name in ipairs(redis.call('ZRANGEBYSCORE', workers, '(' .. (now + lease_ms), '+inf')) do
        redis.call('ZINCRBY', workers, silent_ms, name)
      end
    end
  end
  redis.call('HSET', tag .. ':stats', 'heard', now)
  return ends
end
