-- parts: clock bulk record wait_list phase waiting lease warmth single_flight
-- Prefers warm requests in environments where some name affinities. Of the first 16 that wait in a tenant's
-- list, it takes the warmest first, and equally warm ones in order. A request that was first passed over
-- two seconds ago goes next, however many warm ones come.
local affinity = {WINDOW = 16, PASSED_OVER_MS = 2000}

-- Returns the i-th waiting request of the list, if there is one. `front` holds what was popped from the
-- list: `ids`, how many of them were `seen`, and those that wait (`front[1]`, `front[2]` and so on). The
-- first few are mostly enough, so it pops only `wanted` at first.
function affinity.at(front, i, wanted)
  while not front[i] and waiting.popped < waiting.MAX_POPPED do
    if front.seen == #front.ids then
      front.ids = redis.call('LPOP', front.list, i == 1 and wanted or affinity.WINDOW) or {}
      front.seen = 0
      if #front.ids == 0 then break end
      front.texts, front.phases = waiting.look(front.ids)
    end
    front.seen, waiting.popped = front.seen + 1, waiting.popped + 1
    local n = front.seen
    local r = waiting.one(front.name, front.ids[n], record.read(front.texts[n]), front.texts[n], front.phases[n])
    if r and front.known[r.request_id] then
      -- A request that was withdrawn and sent again stands there twice.
      wait_list.forget(front.name, 1)
    elseif r then
      r.rank = r.affinity ~= '' and warmth.rank(r) or 3
      front[#front + 1], front.known[r.request_id] = r, true
    end
  end
  return front[i]
end

-- Returns the number of the request that goes next; nil if none waits.
function affinity.best(front, wanted)
  local best
  for i = 1, affinity.WINDOW do
    local r = affinity.at(front, i, wanted)
    if not r then break end
    if not best or r.rank < front[best].rank then best = i end
    if front[best].rank == 1 or affinity.is_next(r) then break end
  end
  return best
end

function affinity.pass_over(front, best)
  for i = 1, best - 1 do
    if not front[i].passed then
      redis.call('HSET', tag .. ':phase', front[i].request_id, phase.passed_over(now))
      front[i].passed = now
    end
  end
end

-- Puts requests that were popped and not taken back to the front of the list.
function affinity.put_back(front)
  local rest = {}
  for i = #front.ids, front.seen + 1, -1 do rest[#rest + 1] = front.ids[i] end
  for i = #front, 1, -1 do rest[#rest + 1] = front[i].request_id end
  bulk.call('LPUSH', front.list, rest)
end

-- Returns whether this request, the first of its list, goes before all others.
function affinity.is_next(r)
  return r.rank == 1 or r.passed and now - r.passed >= affinity.PASSED_OVER_MS
end

-- Takes up to n requests of the list with this name; returns how many it took.
function affinity.claim(name, n)
  local front, got = {name = name, list = tag .. ':' .. name, ids = {}, seen = 0, known = {}}, 0
  local r = n == 1 and waiting.pop(name)
  if r then
    r.rank = r.affinity ~= '' and warmth.rank(r) or 3
    if affinity.is_next(r) then
      if lease.take(r.request_id, r, r.text, false) then return 1 end
    else
      front[1], front.known[r.request_id] = r, true
    end
  end
  while got < n do
    local best = affinity.best(front, n - got)
    if not best then break end
    affinity.pass_over(front, best)
    local r = table.remove(front, best)
    if lease.take(r.request_id, r, r.text, false) then got = got + 1 end
  end
  affinity.put_back(front)
  return got
end
