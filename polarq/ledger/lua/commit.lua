-- KEYS task, rollout, leases, events, tasks
-- ARGV rollout_id, token, state, summary, events_max, task_id, stem, keep_s, reward ('' for none),
--   '1' when it is usable, the summary of what an early stop ends before it began, what the run's counters of fidelity
--   grow by, and of a payload that has to be here its stem and how many chunks it has
local task, rollout, leases, events, tasks = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local rollout_id, token, to, max, task_id = ARGV[1], ARGV[2], ARGV[3], ARGV[5], ARGV[6]
local r = redis.call('HMGET', rollout, 'state', 'token', 'owner')
if not r[1] then return {'lost', 'unknown'} end
if ENDS[r[1]] then
  if r[2] == token and r[1] == to then
    return {'already', redis.call('HEXISTS', task, 'ended_ms')}
  end
  return {'lost', r[1]}
end
if r[2] ~= token or not may(r[1], to) or r[1] == 'queued' then return {'lost', r[1]} end
-- A failover may have lost what was written before it.
for chunk = 0, tonumber(ARGV[14] or 0) - 1 do
  if redis.call('EXISTS', ARGV[13] .. ':' .. chunk) == 0 then return {'missing'} end
end
local now = now_ms()
redis.call('HSET', rollout, 'state', to, 'summary', ARGV[4], 'ended_ms', now)
redis.call('HDEL', rollout, 'lease_ms', 'grant')
be_over(leases, task, rollout_id)
redis.call('HINCRBY', task, to, 1)
touch(task, tasks, task_id, now)
local totals = beside(events, 'run-fidelity:' .. redis.call('HGET', task, 'run_id'))
for name, count in pairs(cjson.decode(ARGV[12])) do redis.call('HINCRBY', totals, name, string.format('%d', count)) end
redis.call('EXPIRE', totals, ARGV[8])
local reward = cjson.null
if ARGV[9] ~= '' then reward = tonumber(ARGV[9]) end
emit(events, max, 'session.state_changed', {task_id = task_id, session_id = rollout_id, status = to, node_id = r[3],
  reward = reward})
local answer = {'committed', 0}
if ARGV[10] == '1' then
  local usable = redis.call('HINCRBY', task, 'usable', 1)
  local t = redis.call('HMGET', task, 'early', 'early_usable', 'state', 'created_ms', 'num')
  if t[1] and usable >= tonumber(t[1]) and not t[2] and t[3] == 'running' and ended(task) < tonumber(t[5]) then
    redis.call('HSET', task, 'early_usable', usable, 'early_ms', now - tonumber(t[4]))
    emit(events, max, 'task.early_stop', {task_id = task_id, usable_sessions = usable})
    local unbegun = cjson.decode(ARGV[11])
    unbegun.early_stop = {min_usable = tonumber(t[1]), usable = usable, elapsed_ms = now - tonumber(t[4])}
    for i = 0, tonumber(t[5]) - 1 do
      stop(events, max, task, task_id, ARGV[7], i, cjson.encode(unbegun), 'early_stop', now, answer)
    end
  end
end
answer[2] = finish(task, events, max, ARGV[7], task_id, ARGV[8], now)
return answer
