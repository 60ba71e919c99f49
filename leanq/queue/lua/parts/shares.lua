-- parts: bulk lasting
-- Shares tenants' CPU time, if an operator has given any tenant a weight (:weights; 1 for all others). The
-- tenant of a ring with the least virtual time is next. Virtual time is the CPU time (ms) of a tenant's
-- requests, divided by its weight.
-- A lease is charged the mean of the tenant's requests, or the longest run if there is no mean yet.
-- Settling corrects the charge. A request that goes back without counting its attempt gets the charge back.
-- An attempt that ends without a result stays charged.
-- :shares:ENVIRONMENT:PRIORITY has each tenant's virtual time and mean. Under the empty name it has the
-- virtual time of the tenant served last. No tenant lies behind that by more than 4 of its requests, so an
-- idle tenant saves up no more.
local MAX_BEHIND, MAX_ACCOUNTS, IDLE_MS = 4, 2000, 86400000

-- Returns the number in a stored text; nil if there is none.
local function finite(text)
  local number = tonumber(text or '')
  if number and number - number == 0 then return number end
end

-- Opens the shares; nil if there are no weights. They are made here, so that a queue without weights makes
-- none of these functions.
local function open_shares()
  local weights, all = {}, redis.call('HGETALL', lasting .. ':weights')
  if #all == 0 then return nil end
  for i = 1, #all, 2 do
    local weight = finite(all[i + 1])
    -- No leanq command stores other weights: dividing by one would spread to all tenants' times, for good.
    if weight and weight > 0 then weights[all[i]] = weight end
  end
  -- By a ring's name: its virtual time, and its tenants' accounts.
  local shares, rings = {}, {}

  local function read(ring, tenant, text)
    local account = {weight = weights[tenant] or 1, time = ring.time}
    if text then
      local time, mean = string.match(text, '^(%S+) (%S+)$')
      account.mean = finite(mean)
      account.time =
        math.max(finite(time) or ring.time, ring.time - MAX_BEHIND * (account.mean or 0) / account.weight)
    end
    ring.accounts[tenant] = account
  end

  -- Returns the ring, with the accounts of these tenants at hand.
  local function look(ring_name, tenants)
    local key, ring, names = tag .. ':shares:' .. ring_name, rings[ring_name], {}
    if not ring then
      ring = {time = finite(redis.call('HGET', key, '')) or 0, accounts = {}, charged = {}}
      rings[ring_name] = ring
    end
    for _, tenant in ipairs(tenants) do
      if not ring.accounts[tenant] then names[#names + 1] = tenant end
    end
    for i, text in ipairs(bulk.call('HMGET', key, names)) do read(ring, names[i], text) end
    return ring
  end

  -- Returns how many of n requests each tenant is to give. A tenant whose mean CPU time is not yet known
  -- gives one.
  function shares.plan(ring_name, tenants, n)
    local ring, times, counts = look(ring_name, tenants), {}, {}
    for i, tenant in ipairs(tenants) do times[i], counts[i] = ring.accounts[tenant].time, 0 end
    for _ = 1, n do
      local next_one
      for i, tenant in ipairs(tenants) do
        local may = counts[i] == 0 or ring.accounts[tenant].mean
        if may and (not next_one or times[i] < times[next_one]) then next_one = i end
      end
      if not next_one then break end
      local account = ring.accounts[tenants[next_one]]
      ring.time = math.max(ring.time, times[next_one])
      counts[next_one] = counts[next_one] + 1
      times[next_one] = times[next_one] + (account.mean or 0) / account.weight
    end
    return counts
  end

  -- Charges a tenant for a lease; returns the lease's note of the charge.
  function shares.charge(r)
    local ring = look(r.environment .. ':' .. r.priority, {r.tenant})
    local account = ring.accounts[r.tenant]
    local cost = account.mean or r.run_ms
    account.time = account.time + cost / account.weight
    ring.charged[r.tenant] = true
    return r.priority .. ' ' .. string.format('%.17g', cost)
  end

  -- Corrects a lease's charge. `cpu_ms` is the CPU time that it took, or nil if it goes back and takes
  -- none.
  function shares.correct(lease, cpu_ms)
    local priority, cost = string.match(lease.charge, '^(%d) (%S+)$')
    local ring = look(lease.environment .. ':' .. priority, {lease.tenant})
    local account = ring.accounts[lease.tenant]
    -- A request without CPU time costs a little too, or its tenant would have turns without end.
    local took = cpu_ms and math.max(cpu_ms, 1) or 0
    account.time = account.time + (took - tonumber(cost)) / account.weight
    if cpu_ms then account.mean = account.mean and account.mean + (took - account.mean) / 8 or took end
    ring.charged[lease.tenant] = true
  end

  function shares.write()
    for ring_name, ring in pairs(rings) do
      local key, values = tag .. ':shares:' .. ring_name, {'', string.format('%.17g', ring.time)}
      for tenant in pairs(ring.charged) do
        local account = ring.accounts[tenant]
        values[#values + 1] = tenant
        values[#values + 1] = string.format('%.17g ', account.time)
          .. (account.mean and string.format('%.17g', account.mean) or '-')
      end
      -- Forget all accounts once there are too many tenants.
      if redis.call('HLEN', key) > MAX_ACCOUNTS then redis.call('DEL', key) end
      bulk.call('HSET', key, values)
      redis.call('PEXPIRE', key, IDLE_MS)
    end
  end
  return shares
end
