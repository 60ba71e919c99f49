-- parts: clock bulk phase publish counters record dead_letters single_flight deadline requeue warmth shares remember
-- parts: submit_time
-- arguments: worker settlements ends
-- each call: settle.shares, settle.written, settle.gone = nil, {}, {}
-- Settles the requests that a worker has finished.
-- `ends`: the fields that settlements share. They are outcome, reason (may be ''), warm, way (how Lean got
-- its prefix), fingerprint and uploaded. Each gets `n`, how many accepted settlements end so, and `ended`,
-- by environment how many of their clients hear of it.
-- `cpu_ms` belongs to each settlement. `shares`: see shares.lua; opened for the first lease that was
-- charged.
-- `gone`: keys that are no longer needed, of bodies and uploads.
local settle = {}

-- Returns whether a result counted before: the head of the reply then has its token.
function settle.has_counted(request_id, token)
  -- 0x93 opens an array of three, 0xa0 + n a text of n bytes.
  local head = '\147' .. string.char(160 + #token) .. token
  return redis.call('GETRANGE', tag .. ':req:' .. request_id, 0, #head - 1) == head
end

-- Ends the requests that joined a run with its reply; returns how many. Copies of one reply take at most 16
-- MB; the remaining requests run again.
function settle.share(run_id, reply, environment)
  local joined, shared = tag .. ':joined:' .. run_id, 0
  local request_ids = redis.call('ZRANGE', joined, 0, -1)
  if #request_ids > 0 then redis.call('UNLINK', joined) end
  for _, request_id in ipairs(request_ids) do
    local r, version = record.load(request_id)
    local is_joined = phase.read_joined(redis.call('HGET', tag .. ':phase', request_id)) == run_id
    if version and is_joined then
      requeue.one(request_id, 'requeue', 'requeue', environment)
    elseif not r or not is_joined then
      -- The server deleted its record, and its client has sent it again.
    elseif deadline.is_past(r) then
      counters.add('joined', -1)
      deadline.expire(request_id, r, r.attempts + 1, false)
    elseif shared > 0 and (shared + 1) * publish.size(reply) > 16777216 then
      requeue.one(request_id, 'requeue', 'requeue')
    else
      local is_text = type(reply) ~= 'table'
      counters.add('joined', -1)
      publish.finish(request_id, r, is_text and submit_time.set(reply, r.submitted) or reply)
      if not is_text then submit_time.set_at(tag .. ':req:' .. request_id, reply.bytes, r.submitted) end
      shared = shared + 1
    end
  end
  return shared
end

-- Adds the fields of :phase that name a settled run to `fields`, which will be deleted.
function settle.close_runs(runs, fields)
  local keys = {}
  for i, run in ipairs(runs) do keys[i] = single_flight.key(run.lease.environment, run.lease.digest) end
  for i, run_id in ipairs(bulk.call('HMGET', tag .. ':phase', keys)) do
    if run_id == runs[i].request_id then fields[#fields + 1] = keys[i] end
  end
end

function settle.end_joined(runs)
  local joined = {}
  for i, run in ipairs(runs) do joined[i] = tag .. ':joined:' .. run.request_id end
  -- Requests hardly ever join.
  if bulk.existing(joined) == 0 then return end
  for _, run in ipairs(runs) do
    local shared = settle.share(run.request_id, run.reply, run.lease.environment)
    counters.add('coalesced', shared)
    if shared > 0 then counters.ended(run.lease.environment, run.how.outcome, run.how.reason, shared) end
  end
end

-- Counts the CPU time (ms) of a result for its environment and its tenant.
function settle.account(lease, cpu_ms)
  counters.used(lease.environment, lease.tenant, cpu_ms)
  if lease.charge == '' then return end
  if settle.shares == nil then settle.shares = open_shares() or false end
  if settle.shares then settle.shares.correct(lease, cpu_ms) end
end

-- Settles one result with a current token. A heartbeat reports its times.
function settle.one(request_id, reply, how, lease, runs)
  how.n = how.n + 1
  if lease.detached ~= '' then settle.gone[#settle.gone + 1] = record.body_key(request_id) end
  if how.warm and lease.affinity ~= '' then warmth.note(lease.environment, lease.affinity) end
  -- A run without a client was withdrawn before.
  if lease.client ~= '' then
    -- Any client can send many such requests, so large ones would fill the memory.
    if how.reason == 'kernels_disagree' and lease.detached == '' then
      local r, text = record.load(request_id), type(reply) == 'string' and reply or nil
      if r then bury('disagreed', request_id, r, r.attempts + 1, lease.worker, text) end
    end
    local name, n = tag .. ':req:' .. request_id, #settle.written
    if type(reply) == 'table' then publish.write(name, reply, reply_ttl_ms)
    else settle.written[n + 1], settle.written[n + 2] = name, reply end
    publish.tell(request_id, lease.client, reply)
    how.ended[lease.environment] = (how.ended[lease.environment] or 0) + 1
  end
  if lease.digest == '' then return end
  remember(how.fingerprint, lease.digest, reply)
  runs[#runs + 1] = {request_id = request_id, reply = reply, lease = lease, how = how}
end

function settle.count()
  for _, how in ipairs(ends) do
    counters.came(how.way, how.n)
    for environment, n in pairs(how.ended) do counters.ended(environment, how.outcome, how.reason, n) end
  end
end

function settle.leases()
  local phases, request_ids = tag .. ':phase', settlements.request_id
  if #request_ids == 1 then return {redis.call('HGET', phases, request_ids[1])} end
  return bulk.call('HMGET', phases, request_ids)
end

local function upload_of(request_id, token) return tag .. ':upload:' .. token .. ':' .. request_id end

-- Settles all results. Returns the numbers of two kinds: those whose token was not current, and those whose
-- uploaded reply is missing. The latter change nothing, and their replies have to come inside another call.
function settle.all()
  if #settlements.request_id == 0 then return {}, {} end
  for _, how in ipairs(ends) do how.n, how.ended = 0, {} end
  local tokens, replies, fenced, done, runs, leases = settlements.token, settlements.reply, {}, {}, {}, {}
  local missing, is_done, n = {}, {}, 0
  for k, text in ipairs(settle.leases()) do
    local request_id = settlements.request_id[k]
    -- Most leases of one call are the same text.
    local lease = leases[text]
    if lease == nil then lease = phase.read_lease(text) or false; leases[text] = lease end
    local how, reply = ends[settlements.how[k]], replies[k]
    if how.uploaded then settle.gone[#settle.gone + 1] = upload_of(request_id, tokens[k]) end
    if is_done[request_id] and is_done[request_id] == tokens[k] then
      -- It counted earlier in this call.
    elseif lease and lease.token == tokens[k] then
      if how.uploaded then reply = publish.uploaded(upload_of(request_id, tokens[k])) end
      if reply then
        n = n + 1
        done[n], is_done[request_id] = request_id, tokens[k]
        settle.account(lease, settlements.cpu_ms[k])
        settle.one(request_id, reply, how, lease, runs)
      else
        missing[#missing + 1] = k
      end
    elseif not settle.has_counted(request_id, tokens[k]) then
      fenced[#fenced + 1] = k
    end
  end
  publish.write_all(settle.written)
  counters.add('fenced', #fenced)
  settle.count()
  if #done > 0 then
    bulk.call('ZREM', tag .. ':processing:' .. worker, done)
    counters.add('settled', #done)
    if #runs > 0 then settle.close_runs(runs, done) end
    bulk.call('HDEL', tag .. ':phase', done)
    if #runs > 0 then settle.end_joined(runs) end
  end
  bulk.call('UNLINK', nil, settle.gone)
  return fenced, missing
end
