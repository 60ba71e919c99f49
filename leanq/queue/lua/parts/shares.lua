-- parts: bulk
-- Tenants' shares of the CPU time, where an operator has given any tenant a weight (:weights; 1 for all
-- others): of a ring's tenants the one whose virtual time is least is next. That is the CPU time (ms)
-- which its requests took, divided by its weight. A lease is charged what the tenant's requests took on
-- average, the first one as long as it may run; settle corrects the charge, and what is given back without
-- its attempt counting gets it back. An attempt that ends without a result stays charged.
-- :shares:ENVIRONMENT:PRIORITY has by tenant its virtual time and its mean, and under no name the virtual
-- time of the tenant that was served last. No tenant lies behind that by more than 4 of its requests, so
-- that one which had nothing to do has saved up no more.
local MAX_BEHIND, MAX_ACCOUNTS, IDLE_MS = 4, 2000, 86400000

-- A number of a stored text; nil where it is none.
local function finite(text)
  local number = tonumber(text or '')
  if number and number - number == 0 then return number end
end

-- A queue without weights makes none of these functions. nil where there are no weights.
local function open_shares()
  local weights, all = {}, redis.call('HGETALL', tag .. ':weights')
  if #all == 0 then return nil end
  for i = 1, #all, 2 do
    local weight = finite(all[i + 1])
    -- What no command of leanq's stores: a division by it would spread to all tenants' times, for good.
    if weight and weight > 0 then weights[all[i]] = weight end
  end
  -- By a ring's name its virtual time, and its tenants' accounts.
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

  -- The ring, with the accounts of these tenants at hand.
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

  -- How many of n requests each of the tenants is to give. One whose requests' CPU time is not yet known
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

  -- Charges a tenant for a lease; returns what the lease says of it.
  function shares.charge(r)
    local ring = look(r.environment .. ':' .. r.priority, {r.tenant})
    local account = ring.accounts[r.tenant]
    local cost = account.mean or r.run_ms
    account.time = account.time + cost / account.weight
    ring.charged[r.tenant] = true
    return r.priority .. ' ' .. string.format('%.17g', cost)
  end

  -- Corrects a lease's charge: `cpu_ms` is what it took, or nil where it goes back and takes nothing.
  function shares.correct(lease, cpu_ms)
    local priority, cost = string.match(lease.charge, '^(%d) (%S+)$')
    local ring = look(lease.environment .. ':' .. priority, {lease.tenant})
    local account = ring.accounts[lease.tenant]
    -- What takes no CPU time counts a little all the same, or it would have no end of turns.
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
      -- Tenants without end begin anew.
      if redis.call('HLEN', key) > MAX_ACCOUNTS then redis.call('DEL', key) end
      bulk.call('HSET', key, values)
      redis.call('PEXPIRE', key, IDLE_MS)
    end
  end
  return shares
end
