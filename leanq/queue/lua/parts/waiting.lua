-- parts: clock bulk record phase wait_list deadline single_flight left
-- each call: waiting.taken, waiting.popped = {}, 0
-- Waiting requests, as a claim finds them. `taken`: requests that this call has leased, joined to a run, or
-- ended. `popped`: entries that it took from lists. Withdrawn ones count, so that one call takes bounded
-- time.
local waiting = {MAX_POPPED = 1000}

-- Returns whether the request waits in the list of this name. It ends a request that is past its deadline,
-- forgets the entry of a withdrawn one, and leaves one that it cannot read to others; none of them waits.
function waiting.is_in(name, request_id, r, text, phase_text)
  local version = not r and record.other_version(text)
  if version then
    left.put(string.match(name, ':([^:]*)'), version, request_id, name)
    return false
  end
  if not r or waiting.taken[request_id] or wait_list.name_of(r, phase_text) ~= name then
    wait_list.forget(name, 1)
    return false
  end
  if deadline.is_past(r) then
    deadline.expire(request_id, r, r.attempts, true)
    waiting.taken[request_id] = true
    return false
  end
  return true
end

-- Returns the request if it waits in the list of this name, else nil. It adds the id, the record's text,
-- and when a warmer request first went before it.
function waiting.one(name, request_id, r, text, phase_text)
  if not waiting.is_in(name, request_id, r, text, phase_text) then return nil end
  r.request_id, r.text, r.passed = request_id, text, phase.read_passed_over(phase_text)
  return r
end

-- Returns the records of requests as texts, and their phases.
function waiting.look(request_ids)
  local names, prefix = {}, tag .. ':req:'
  for i, request_id in ipairs(request_ids) do names[i] = prefix .. request_id end
  return bulk.call('MGET', nil, names), bulk.call('HMGET', tag .. ':phase', request_ids)
end

-- Returns the requests that wait, each in the list that `names` says. The ids come first, then by the same
-- numbers their records (see record.read_next) and the records' texts.
function waiting.among(names, request_ids)
  local found, records, found_texts, n = {}, {}, {}, 0
  local texts, phases = waiting.look(request_ids)
  for i, request_id in ipairs(request_ids) do
    local r = record.read_next(texts[i])
    if waiting.is_in(names[i], request_id, r, texts[i], phases[i]) then
      n = n + 1
      found[n], records[n], found_texts[n] = request_id, r, texts[i]
    end
  end
  single_flight.prefetch(records)
  return found, records, found_texts
end

-- Takes the first request out of a list; nil if the list is empty or the entry waits no more.
function waiting.pop(name)
  local request_id = redis.call('LPOP', tag .. ':' .. name)
  if not request_id then return nil end
  waiting.popped = waiting.popped + 1
  local text = redis.call('GET', tag .. ':req:' .. request_id)
  local r = record.read(text)
  return waiting.one(name, request_id, r, text, single_flight.phase_of(request_id, r))
end
