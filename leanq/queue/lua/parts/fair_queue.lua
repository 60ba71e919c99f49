-- parts: bulk wait_list counters waiting lease affinity
-- each call: fair_queue.left = {}
-- The order of claims: tenants in round-robin within a priority, and priorities without starvation. `left`:
-- environments in which some tenant's list is known not to be empty. exchange.lua takes the same turns for
-- one request by itself.
local fair_queue = {}

-- Takes up to so many requests out of each list; returns how many it took.
function fair_queue.pop(names, counts)
  local from, popped, got, n = {}, {}, 0, 0
  for i, name in ipairs(names) do
    local ids = counts[i] > 0 and redis.call('LPOP', tag .. ':' .. name, counts[i]) or {}
    for _, request_id in ipairs(ids) do
      n = n + 1
      from[n], popped[n] = name, request_id
    end
  end
  waiting.popped = waiting.popped + n
  local request_ids, records, texts = waiting.among(from, popped)
  for i, request_id in ipairs(request_ids) do
    local r = records[i]
    if waiting.taken[request_id] then wait_list.forget(wait_list.name_of(r), 1)
    elseif lease.take(request_id, r, texts[i], false) then got = got + 1 end
  end
  return got
end

-- Takes one request of a priority, of the tenant whose turn it is.
function fair_queue.draw_one(environment, priority, has_affinity)
  local ring_name, got = environment .. ':' .. priority, 0
  local ring = tag .. ':ring:' .. ring_name
  while got == 0 and waiting.popped < waiting.MAX_POPPED do
    local tenant = redis.call('LMOVE', ring, ring, 'LEFT', 'RIGHT')
    if not tenant then break end
    local name = 'wait:' .. ring_name .. ':' .. tenant
    if has_affinity then
      got = affinity.claim(name, 1)
    else
      local r = waiting.pop(name)
      if r and lease.take(r.request_id, r, r.text, false) then got = 1 end
    end
    if redis.call('EXISTS', tag .. ':' .. name) == 1 then fair_queue.left[environment] = true
    else redis.call('LREM', ring, -1, tenant) end
  end
  return got
end

-- Takes up to n requests of one priority. Tenants give in turn, and several each if they are few. If
-- tenants have weights, they give by these, and one look covers the first 200 of the ring.
function fair_queue.draw(environment, priority, n, has_affinity)
  if n == 1 and not lease.shares then return fair_queue.draw_one(environment, priority, has_affinity) end
  local ring_name, got = environment .. ':' .. priority, 0
  local ring = tag .. ':ring:' .. ring_name
  while got < n and waiting.popped < waiting.MAX_POPPED do
    local asked, names, keys, keep = n - got, {}, {}, {}
    local looked = lease.shares and 200 or asked
    local tenants = redis.call('LPOP', ring, looked)
    if not tenants then break end
    local counts = lease.shares and lease.shares.plan(ring_name, tenants, asked) or {}
    local each = math.floor(asked / #tenants)
    for i, tenant in ipairs(tenants) do
      names[i], counts[i] = 'wait:' .. ring_name .. ':' .. tenant, counts[i] or each
      keys[i] = tag .. ':' .. names[i]
    end
    if has_affinity then
      for i, name in ipairs(names) do got = got + affinity.claim(name, counts[i]) end
    else
      got = got + fair_queue.pop(names, counts)
    end
    for i, is_filled in ipairs(bulk.filled(keys)) do
      if is_filled then keep[#keep + 1] = tenants[i] end
    end
    if #keep > 0 then
      redis.call('RPUSH', ring, unpack(keep))
      fair_queue.left[environment] = true
    elseif #tenants < looked then break end
  end
  return got
end

-- Takes up to n requests of an environment, given the priorities that have work. Seven picks of eight go to
-- the most urgent one; the eighth goes round all priorities. `turn`: how many picks there were before.
function fair_queue.claim(environment, priorities, n, turn, has_affinity)
  local claimed = 0
  while claimed < n and #priorities > 0 do
    local pick = (turn + claimed) % 8
    local first, share = 0, math.min(n - claimed, 7 - pick)
    -- If only one priority has work, it gets all picks.
    if #priorities == 1 then first, share = priorities[1], n - claimed
    elseif pick == 7 then first, share = math.floor((turn + claimed) / 8) % 3, 1 end
    local got = fair_queue.draw(environment, first, share, has_affinity)
    for _, priority in ipairs(priorities) do
      if got < share and priority ~= first then
        got = got + fair_queue.draw(environment, priority, share - got, has_affinity)
      end
    end
    claimed = claimed + got
    if got == 0 or #priorities == 1 then break end
  end
  counters.picked(environment, claimed)
  return claimed
end
