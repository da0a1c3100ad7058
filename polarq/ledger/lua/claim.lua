-- KEYS task, rollout, leases, waiting, events, tasks
-- ARGV rollout_id, node_id, lease_ms, job_id, events_max, task_id, nonce, node as JSON ('' for none), incarnation
-- With a node, the named rollout is a hint: what stands first in line and fits the node is claimed, and only where
-- nothing does the named one is looked at.
local task, rollout, leases, waiting, events, tasks = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local rollout_id, node_id, lease, job_id, max, task_id = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]
local remembered = beside(leases, 'claimed:' .. ARGV[7])
if ARGV[8] ~= '' then
  local node = cjson.decode(ARGV[8])
  local best = redis.call('GET', remembered)
  if not best then
    -- Its own flags hold for a node that has not read them yet.
    if held_back(leases, node_id) then return {'held', 'node ' .. node_id .. ' takes nothing now'} end
    best = choose(leases, node, 1, LONGEST_LOOK)[1]
  end
  if best then
    rollout_id, task_id = best, task_of(best)
    task, rollout = task_key(leases, best), rollout_key(leases, best)
  elseif not pcall(stands, leases, node, rollout_id, {}) then
    return {'unknown', 'its record is damaged'}
  elseif redis.call('HGET', rollout, 'state') == 'queued' then
    local run = redis.call('HGET', task, 'run_id')
    if room(leases, node, run) == 0 then return {'held', 'run ' .. run .. ' may start nothing now'} end
    if not fits(leases, node, task) then return {'held', 'another node has to run it'} end
  end
end
local r = redis.call('HMGET', rollout, 'state', 'lease_ms', 'owner', 'queued_ms', 'nonce', 'attempt', 'token',
  'claimed_ms')
local state = r[1]
if not state then return {'unknown'} end
if ENDS[state] then return {'done', state} end
local now = now_ms()
if r[5] == ARGV[7] and state ~= 'queued' then
  -- The same claim once more: the answer to the first got lost on its way.
  return {'granted', tonumber(r[6]), tonumber(r[7]), tonumber(r[8]) - tonumber(r[4]),
    redis.call('HGET', task, 'request'), tonumber(r[8]), rollout_id,
    unpack(redis.call('HMGET', rollout, 'policy_version', 'losses'))}
end
local run = redis.call('HGET', task, 'run_id')
if redis.call('SISMEMBER', beside(leases, 'runs-paused'), run) == 1 then return {'held', 'run ' .. run .. ' is paused'} end
if state ~= 'queued' then
  -- What a node has let go of is the reaper's to judge, who sees what was lost with it.
  if tonumber(r[2] or 0) > now or ARGV[8] ~= '' then return {'busy', r[3]} end
  -- Its lease ran out and nobody has given it back yet: this claim is the next attempt.
  note_loss(rollout, r[3], state, r[6], cause_of(leases, r[3], '', false), now, 0, 1, '')
  shut(leases, rollout)
elseif not may(state, 'preparing') then
  return {'busy', ''}
else
  redis.call('HINCRBY', task, 'queued', -1)
end
local attempt = redis.call('HINCRBY', rollout, 'attempt', 1)
-- Not just the next number: a claim that a failover lost may have given that one out, and its holder lives.
local salt = tonumber(string.sub(ARGV[7], 1, 6), 16)
local token = redis.call('HINCRBY', rollout, 'token', 1 + salt)
local tries = redis.call('HGET', rollout, 'tries') or ''
if #tries > 1000 then tries = string.gsub(tries, '^%S+ ', '') end
redis.call('HSET', rollout, 'tries', tries .. attempt .. '-' .. token .. ' ')
redis.call('HSET', rollout, 'state', 'preparing', 'owner', node_id, 'lease_ms', now + lease, 'claimed_ms', now,
  'stage_ms', now, 'job_id', job_id, 'nonce', ARGV[7], 'incarnation', ARGV[9])
-- Which policy was the newest when this attempt began.
local policy = redis.call('HMGET', beside(leases, 'run:' .. run), 'policy_version', 'keep_s')
if policy[1] then
  redis.call('HSET', rollout, 'policy_version', policy[1])
  redis.call('EXPIRE', beside(leases, 'run:' .. run), policy[2])
else
  redis.call('HDEL', rollout, 'policy_version')
end
be_held(leases, task, rollout_id, now + lease)
if ARGV[8] ~= '' then
  -- A repeat of this call, should its answer get lost, has to find the same rollout.
  redis.call('SET', remembered, rollout_id, 'PX', 2 * lease)
  if redis.call('HEXISTS', task, 'together') == 1 then redis.call('HSET', task, 'home', node_id) end
end
touch(task, tasks, task_id, now)
emit(events, max, 'session.state_changed', {task_id = task_id, session_id = rollout_id, status = 'preparing',
  node_id = node_id, attempt = attempt})
return {'granted', attempt, token, now - tonumber(r[4]), redis.call('HGET', task, 'request'), now, rollout_id,
  policy[1], redis.call('HGET', rollout, 'losses')}
