-- parts: clock lists record place lines expire single_flight
-- What waits, as a claim finds it. `taken`: requests that this call has leased, joined to a run, or
-- ended. `popped`: entries that it took from lists; withdrawn ones count, so that one call takes bounded
-- time.
local waiting = {taken = {}, popped = 0, MAX_POPPED = 1000}

-- The request, if it waits in the list of this name; nil for what expires hereby, and for what was
-- withdrawn, whose entry is gone from the list.
function waiting.one(name, request_id, text, where)
  local r = not waiting.taken[request_id] and record.read(text)
  if not r or lines.home(r, where) ~= name then
    lines.forget(name, 1)
    return nil
  end
  if expire.is_late(r) then
    expire.finish(request_id, r, r.attempts, true)
    waiting.taken[request_id] = true
    return nil
  end
  r.request_id, r.text, r.passed = request_id, text, place.read_passed(where)
  return r
end

-- The texts of requests, and their places.
function waiting.look(request_ids)
  local names = {}
  for i, request_id in ipairs(request_ids) do names[i] = tag .. ':req:' .. request_id end
  return lists.call('MGET', nil, names), lists.call('HMGET', tag .. ':where', request_ids)
end

-- Those of the requests that wait, each in the list that `names` says.
function waiting.among(names, request_ids)
  local found = {}
  local texts, places = waiting.look(request_ids)
  for i, request_id in ipairs(request_ids) do
    local r = waiting.one(names[i], request_id, texts[i], places[i])
    if r then found[#found + 1] = r end
  end
  single_flight.prefetch(found)
  return found
end
