-- parts: bulk
-- Counters of :stats. What a call counts is written once, at its end. u:ENVIRONMENT:TENANT, a tenant's
-- CPU time (ms), is kept for 100 of these; u:ENVIRONMENT: has that of the tenants beyond.
local counters = {added = {}, MAX_TENANTS = 100}

function counters.add(name, n) counters.added[name] = (counters.added[name] or 0) + n end

-- Counts requests that ended in an environment; the reason may be ''.
function counters.ended(environment, verdict, reason, n)
  counters.add('f:' .. environment .. ':' .. verdict, n)
  if reason ~= '' then counters.add('c:' .. environment .. ':' .. reason, n) end
end

-- The name under which a tenant is counted that was not counted before.
function counters.new_tenant(name)
  if redis.call('HINCRBY', tag .. ':stats', 'tenants', 1) <= counters.MAX_TENANTS then return name end
  redis.call('HINCRBY', tag .. ':stats', 'tenants', -1)
  return string.match(name, '^u:[^:]*:')
end

function counters.write()
  local names, values = {}, {}
  for name, n in pairs(counters.added) do
    if n ~= 0 then names[#names + 1] = name end
  end
  for i, before in ipairs(bulk.call('HMGET', tag .. ':stats', names)) do
    local name, n = names[i], counters.added[names[i]]
    if not before and string.sub(name, 1, 2) == 'u:' then
      redis.call('HINCRBY', tag .. ':stats', counters.new_tenant(name), n)
    else
      values[#values + 1], values[#values + 2] = name, tonumber(before or 0) + n
    end
  end
  bulk.call('HSET', tag .. ':stats', values)
end
