-- parts: wait_list record
-- each call: withdraw.lists = {}
-- Requests that wait no more although their lists still name them.
local withdraw = {}

-- Notes that a request in this list is withdrawn.
function withdraw.note(name, r)
  redis.call('HINCRBY', tag .. ':withdrawn', name, 1)
  withdraw.lists[name] = r
end

-- Drops up to 1,000 withdrawn requests from the front of a list, so that its first entry waits.
function withdraw.trim(name, r)
  local list, dropped = tag .. ':' .. name, 0
  local first = redis.call('LINDEX', list, 0)
  while first and dropped < 1000 do
    local other, version = record.load(first)
    if version or other and wait_list.name_of(other, redis.call('HGET', tag .. ':phase', first)) == name then break end
    redis.call('LPOP', list)
    dropped = dropped + 1
    first = redis.call('LINDEX', list, 0)
  end
  if dropped > 0 then wait_list.forget(name, dropped) end
  -- The server may have lost the list.
  if not first then redis.call('HDEL', tag .. ':withdrawn', name) end
  if not first and name ~= 'quarantined:' .. r.environment then
    local ring_name = r.environment .. ':' .. r.priority
    redis.call('LREM', tag .. ':ring:' .. ring_name, 0, r.tenant)
    redis.call('SREM', tag .. ':parked:' .. ring_name, r.tenant)
  end
end

function withdraw.trim_all()
  for name, r in pairs(withdraw.lists) do withdraw.trim(name, r) end
end
