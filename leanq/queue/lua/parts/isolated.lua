-- parts: waiting lease
-- arguments: worker lease_ms busy
-- Gives each quarantined request a worker to itself.
local isolated = {}

-- Returns an environment's first quarantined request that needs a run of its own: its id, its record, and
-- the record's text.
function isolated.first(environment)
  local name = 'quarantined:' .. environment
  local request_id = redis.call('LINDEX', tag .. ':' .. name, 0)
  while request_id do
    local _, records, texts = waiting.among({name}, {request_id})
    if records[1] and not lease.joins(request_id, records[1], true) then return request_id, records[1], texts[1] end
    redis.call('LPOP', tag .. ':' .. name)
    request_id = redis.call('LINDEX', tag .. ':' .. name, 0)
  end
  return nil
end

-- Returns 'taken' if the worker is empty and got one; 'must_empty' if it should empty itself for one; nil
-- if there is none for it.
function isolated.claim(environment)
  local request_id, r, text = isolated.first(environment)
  if not r then return nil end
  local isolating = tag .. ':isolating:' .. environment
  local holder = redis.call('GET', isolating)
  if busy == 0 then
    redis.call('LPOP', tag .. ':quarantined:' .. environment)
    lease.take(request_id, r, text, true)
    -- Identical requests join it at once, or each of them would empty a worker.
    isolated.first(environment)
    if holder == worker then redis.call('DEL', isolating) end
    return 'taken'
  end
  if holder and holder ~= worker then return nil end
  -- The mark expires soon after the worker stops asking, but not while it empties itself.
  redis.call('SET', isolating, worker, 'PX', 2 * lease_ms)
  return 'must_empty'
end
