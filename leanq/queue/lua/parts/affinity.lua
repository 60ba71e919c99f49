-- parts: clock lists lines place waiting lease warmth single_flight
-- Preference for warm requests in environments where some name affinities.
-- Up to n requests of one tenant's list: of the first 16 that wait, the warmest first, in their order
-- otherwise. A request that was first passed over two seconds ago is passed over no more, however many
-- warm ones come up.
local function choose(name, n)
  local list, line, got = tag .. ':' .. name, {}, 0
  -- What was popped, and how much of that was looked at.
  local popped, texts, places, seen = {}, nil, nil, 0
  -- The i-th that waits, if there is one. Mostly the first ones will do, so that no more are popped.
  local function at(i)
    while not line[i] and waiting.popped < waiting.MAX_POPPED do
      if seen == #popped then
        popped, seen = redis.call('LPOP', list, i == 1 and n - got or 16) or {}, 0
        if #popped == 0 then break end
        texts, places = waiting.look(popped)
      end
      seen, waiting.popped = seen + 1, waiting.popped + 1
      local r = waiting.one(name, popped[seen], texts[seen], places[seen])
      if r and line[r.request_id] then
        -- One that was withdrawn and sent again stands there twice.
        lines.forget(name, 1)
      elseif r then
        r.rank = r.affinity ~= '' and warmth.rank(r) or 3
        line[i], line[r.request_id] = r, true
      end
    end
    return line[i]
  end
  while got < n do
    local best
    for i = 1, 16 do
      local r = at(i)
      if not r then break end
      if not best or r.rank < line[best].rank then best = i end
      if line[best].rank == 1 or r.passed and now - r.passed >= 2000 then break end
    end
    if not best then break end
    for i = 1, best - 1 do
      if not line[i].passed then
        redis.call('HSET', tag .. ':where', line[i].request_id, place.passed(now))
        line[i].passed = now
      end
    end
    local r = table.remove(line, best)
    single_flight.prefetch({r})
    if lease.take(r, false) then got = got + 1 end
  end
  local rest = {}
  for i = #popped, seen + 1, -1 do rest[#rest + 1] = popped[i] end
  for i = #line, 1, -1 do rest[#rest + 1] = line[i].request_id end
  lists.call('LPUSH', list, rest)
  return got
end
