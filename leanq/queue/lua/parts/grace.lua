-- parts: clock
-- arguments: lease_ms
-- When leases may be judged again (ms). While no worker is heard for half a lease (the server was away,
-- or its clock has jumped) leases expire through no fault of their workers', so all get another half to
-- be heard first. A call that looks at leases is heard.
local function grace_ends()
  local heard, ends = unpack(redis.call('HMGET', tag .. ':stats', 'heard', 'expiry_grace'))
  ends = tonumber(ends or 0)
  if now - tonumber(heard or now) > lease_ms / 2 then
    ends = now + lease_ms / 2
    redis.call('HSET', tag .. ':stats', 'expiry_grace', ends)
  end
  redis.call('HSET', tag .. ':stats', 'heard', now)
  return ends
end
