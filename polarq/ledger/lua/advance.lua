-- KEYS task, rollout, events, tasks
-- ARGV rollout_id, token, to, events_max, task_id
local task, rollout, events, tasks = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local r = redis.call('HMGET', rollout, 'state', 'token', 'cancel', 'owner')
if not r[1] or ENDS[r[1]] or r[1] == 'queued' or r[2] ~= ARGV[2] then return 'lost' end
if r[3] == '1' then return 'cancel' end
if r[1] == ARGV[3] then return 'ok' end
if not may(r[1], ARGV[3]) then return {'refused', r[1]} end
local now = now_ms()
redis.call('HSET', rollout, 'state', ARGV[3], 'stage_ms', now)
touch(task, tasks, ARGV[5], now)
emit(events, ARGV[4], 'session.state_changed', {task_id = ARGV[5], session_id = ARGV[1], status = ARGV[3], node_id = r[4]})
return 'ok'
