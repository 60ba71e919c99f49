-- Identical requests, by their digests: one is leased, the leader, and others are attached to it,
-- its followers. :run:LANE:DIGEST names the leader that takes more, :with:LEADER has its followers
-- by age. A follower counts the attempt and shares its end; deadline and client are its own.
-- A leader whose client withdrew it runs on for them: it has its reply and no client ('').

-- So many follow one leader, since they all end in one call. The next of their kind leads anew.
local FOLLOWERS = 1000
-- Copies of one reply for followers take up to so many bytes; the other followers run again.
local SHARED_BYTES = 16777216
-- How many followers this call has sent back.
local disbanded = 0

local function run_key(lane, digest) return P .. ':run:' .. lane .. ':' .. digest end

local function is_follower(rid, leader)
  return call('HGET', P .. ':req:' .. leader, 'st') == 'leased'
    and call('ZSCORE', P .. ':with:' .. leader, rid)
end

-- The leader that the request now follows, and its worker; nil where none runs. suspect: it may
-- take down its worker, and so follows only what runs alone: what others run beside proves nothing
-- against it.
local function attach(rid, lane, digest, submitted, suspect)
  local leader = call('GET', run_key(lane, digest))
  if not leader then return nil end
  local r = call('HMGET', P .. ':req:' .. leader, 'st', 'd', 'solo', 'w')
  local with = P .. ':with:' .. leader
  -- What is no such run was left behind by a server that lost keys, or by an older release.
  if r[1] ~= 'leased' or r[2] ~= digest or suspect and not r[3] then return nil end
  if call('ZCARD', with) >= FOLLOWERS then return nil end
  call('ZADD', with, submitted, rid)
  return leader, r[4]
end

local function close_run(leader, lane, digest)
  local run = run_key(lane, digest)
  if call('GET', run) == leader then call('UNLINK', run) end
end

-- Takes a leased request away from its worker, which is told to stop it.
local function stop(rid, worker, lane, digest)
  call('ZREM', P .. ':work:' .. worker, rid)
  call('RPUSH', P .. ':stop:' .. worker, rid)
  if digest then close_run(rid, lane, digest) end
end

-- A follower ends for itself. The last one takes a run with it that nobody else waits for.
local function detach(rid, leader)
  local with = P .. ':with:' .. leader
  call('ZREM', with, rid)
  local r = call('HMGET', P .. ':req:' .. leader, 'c', 'w', 'l', 'd')
  if r[1] == '' and r[2] and call('ZCARD', with) == 0 then
    stop(leader, r[2], r[3], r[4])
    forget_request(leader)
  end
end

-- Ends the followers of a leader with its reply; returns how many.
local function share(leader, lane, digest, reply, max_attempts, now, ttl_ms, told)
  close_run(leader, lane, digest)
  local with, shared = P .. ':with:' .. leader, 0
  local rids = call('ZRANGE', with, 0, -1)
  if #rids > 0 then call('UNLINK', with) end
  for _, rid in ipairs(rids) do
    local r = call('HMGET', P .. ':req:' .. rid, 'on', 'exp', 'c', 'n', 'at')
    local deadline = tonumber(r[2])
    if r[1] ~= leader then
      -- Somebody deleted it, and its client has sent it again.
    elseif deadline > 0 and now > deadline then
      expire(rid, lane, r[3], tonumber(r[4]), tonumber(r[5]), now, ttl_ms, told, true)
    elseif shared > 0 and (shared + 1) * #reply > SHARED_BYTES then
      put_back(rid, false, max_attempts, now, ttl_ms, told)
    else
      finish(rid, r[3], reply, ttl_ms, told)
      shared = shared + 1
    end
  end
  return shared
end

-- What became of a request whose lease ended without a reply, as put_back; its followers fare
-- likewise. Their order is all the same, since they are.
local function requeue(rid, charge, max_attempts, now, ttl_ms, told, defer)
  local how, lane, digest = put_back(rid, charge, max_attempts, now, ttl_ms, told, defer)
  if digest then
    close_run(rid, lane, digest)
    local with = P .. ':with:' .. rid
    for _, follower in ipairs(call('ZRANGE', with, 0, -1)) do
      if call('HGET', P .. ':req:' .. follower, 'on') == rid then
        put_back(follower, charge, max_attempts, now, ttl_ms, told, defer)
      end
      disbanded = disbanded + 1
    end
    call('UNLINK', with)
  end
  return how
end
