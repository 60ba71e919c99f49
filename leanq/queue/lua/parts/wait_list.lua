-- parts: record phase
-- Waiting lists: one per environment, priority and tenant, and one per environment of requests that wait
-- for an isolated attempt. A ring per environment and priority, named ENVIRONMENT:PRIORITY, holds exactly
-- the tenants whose list is not empty. Tenants that an operator holds back are in :parked instead. A
-- withdrawn request stays in its list until it comes to the front, since LREM walks the whole list. The
-- hash :withdrawn counts such entries by the list's name.
local wait_list = {}

-- Returns the name, without the tag, of the list in which a request waits, given its phase; nil if it waits
-- in none.
function wait_list.name_of(r, phase_text)
  local kind = phase.kind(phase_text)
  if kind == phase.QUARANTINED then return 'quarantined:' .. r.environment end
  if kind and kind ~= phase.PASSED_OVER then return nil end
  r.wait_list = r.wait_list or 'wait:' .. r.environment .. ':' .. r.priority .. ':' .. r.tenant
  return r.wait_list
end

function wait_list.is_paused(kind, name)
  return redis.call('HEXISTS', tag .. ':paused', kind .. ':' .. name) == 1
end

-- Gives a tenant whose list was empty its turn in the ring, or parks it. `push` says at which end.
function wait_list.open(push, ring_name, tenant)
  if wait_list.is_paused('t', tenant) then redis.call('SADD', tag .. ':parked:' .. ring_name, tenant)
  else redis.call(push, tag .. ':ring:' .. ring_name, tenant) end
end

-- Puts a request at the front of its list (LPUSH) or at the end (RPUSH).
function wait_list.put(push, request_id, r)
  local ring_name = r.environment .. ':' .. r.priority
  if redis.call(push, tag .. ':wait:' .. ring_name .. ':' .. r.tenant, request_id) == 1 then
    wait_list.open(push, ring_name, r.tenant)
  end
end

-- Returns which priorities of an environment have work: 1 for priority 0, 2 for 1 and 4 for 2, added up, as
-- EXISTS counts repeated keys.
function wait_list.filled(environment)
  local ring = tag .. ':ring:' .. environment .. ':'
  local zero, one, two = ring .. 0, ring .. 1, ring .. 2
  return redis.call('EXISTS', zero, one, one, two, two, two, two)
end

function wait_list.filled_priorities(environment)
  local found, filled = wait_list.filled(environment), {}
  if found % 2 == 1 then filled[1] = 0 end
  if found % 4 >= 2 then filled[#filled + 1] = 1 end
  if found >= 4 then filled[#filled + 1] = 2 end
  return filled
end

-- Returns whether an environment's lists have entries, which may have been withdrawn.
function wait_list.any(environment)
  local ring = tag .. ':ring:' .. environment .. ':'
  return redis.call('EXISTS', ring .. 0, ring .. 1, ring .. 2, tag .. ':quarantined:' .. environment) > 0
end

-- Notes that n entries that waited no more have left a list.
function wait_list.forget(name, n)
  if redis.call('HINCRBY', tag .. ':withdrawn', name, -n) <= 0 then
    redis.call('HDEL', tag .. ':withdrawn', name)
  end
end
