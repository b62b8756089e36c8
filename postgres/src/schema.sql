CREATE TABLE IF NOT EXISTS tfw_counters (
    scope text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    win text COLLATE "C" NOT NULL,
    start_ms bigint NOT NULL,
    end_ms bigint NOT NULL,
    used bigint NOT NULL,
    until_ms bigint NOT NULL,
    quota text NOT NULL,
    -- The row's place in the call that wrote it last. Below zero: the row is not a counter yet.
    place integer NOT NULL,
    -- The key first: most comparisons end there.
    PRIMARY KEY (key, scope, win)
) WITH (fillfactor = 60);

-- To find that an index is there, CREATE INDEX IF NOT EXISTS would lock the table against writes.
DO $$ BEGIN
    IF to_regclass('tfw_counters_until_ms') IS NULL THEN
        CREATE INDEX tfw_counters_until_ms ON tfw_counters (until_ms);
    END IF;
END $$;

CREATE OR REPLACE VIEW tfw AS
SELECT
    scope AS name,
    CASE WHEN key ~ '^[tu][^,%]*$' THEN substr(key, 2) ELSE key END AS key,
    quota,
    used,
    to_timestamp(start_ms / 1000.0) AS start,
    to_timestamp(until_ms / 1000.0) AS until
FROM tfw_counters
WHERE until_ms > extract(epoch FROM clock_timestamp()) * 1000 AND place > 0;

-- Functions, since a session keeps their plans, also behind a pooler that shares sessions. A plan
-- that was made while the table was empty would scan it when it has grown, whatever the query's
-- shape: to scan nothing costs nothing. So they are planned without scans, for all arguments.

-- The server's time and the rows, in the order of the names. The time is taken after the rows.
CREATE OR REPLACE FUNCTION tfw_read(
    scopes text[], keys text[], wins text[],
    OUT now_ms bigint,
    OUT starts bigint[], OUT ends bigint[], OUT useds bigint[], OUT untils bigint[]
) LANGUAGE plpgsql
SET search_path FROM CURRENT SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
-- A server process that waits for a lock would not notice that its client has left.
SET lock_timeout = '100ms'
AS $$
BEGIN
    -- Its clock and its rows are not those that count.
    IF current_setting('transaction_read_only')::boolean THEN
        RAISE read_only_sql_transaction;
    END IF;
    SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint, array_agg(c.start_ms),
        array_agg(c.end_ms), array_agg(c.used), array_agg(c.until_ms)
    INTO now_ms, starts, ends, useds, untils
    -- A look-up for each name, as a subquery with OFFSET is not made a join.
    FROM (
        SELECT t.* FROM unnest(scopes, keys, wins) WITH ORDINALITY AS r(scope, key, win, i)
        LEFT JOIN LATERAL (
            SELECT t.start_ms, t.end_ms, t.used, t.until_ms FROM tfw_counters t
            WHERE t.scope = r.scope AND t.key = r.key AND t.win = r.win AND t.place > 0 OFFSET 0
        ) t ON true
        ORDER BY r.i
    ) c;
END $$;

-- Writes rows that are as they were read, each by itself, and returns their places. A row that was
-- none was read with an end below zero. Rows are locked in the order of all nodes, for as long as
-- the statement takes; ON CONFLICT finds them by the primary key. Numbers are taken from their
-- arrays, as each argument of unnest() would be a table of its own.
CREATE OR REPLACE FUNCTION tfw_swap(
    scopes text[], keys text[], wins text[], quotas text[],
    had_starts bigint[], had_ends bigint[], had_useds bigint[], had_untils bigint[],
    starts bigint[], ends bigint[], useds bigint[], untils bigint[]
) RETURNS integer[] LANGUAGE plpgsql
SET search_path FROM CURRENT SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
-- Longer than a statement of another node takes.
SET lock_timeout = '20ms'
AS $$
#variable_conflict use_column
DECLARE written integer[];
BEGIN
    WITH w AS (
        INSERT INTO tfw_counters AS t
        -- What was read and is gone is inserted as no counter.
        SELECT r.scope, r.key, r.win, starts[r.i], ends[r.i], useds[r.i], untils[r.i], r.quota,
            CASE WHEN had_untils[r.i] < 0 THEN r.i ELSE -r.i END
        FROM unnest(scopes, keys, wins, quotas) WITH ORDINALITY AS r(scope, key, win, quota, i)
        ORDER BY r.i
        ON CONFLICT (key, scope, win) DO UPDATE SET start_ms = excluded.start_ms,
            end_ms = excluded.end_ms, used = excluded.used, until_ms = excluded.until_ms,
            quota = excluded.quota, place = abs(excluded.place)
        WHERE CASE WHEN excluded.place > 0 THEN t.place < 0
            ELSE t.place > 0 AND t.start_ms = had_starts[-excluded.place]
                AND t.end_ms = had_ends[-excluded.place] AND t.used = had_useds[-excluded.place]
                AND t.until_ms = had_untils[-excluded.place] END
        RETURNING t.place
    )
    SELECT array_agg(w.place) INTO written FROM w WHERE w.place > 0;
    RETURN written;
END $$;

-- The same for groups of rows, each of which is written as a whole or not at all. A row that
-- another node writes at this moment is skipped, and its group is not written: nobody waits for a
-- lock with another one in his hands.
CREATE OR REPLACE FUNCTION tfw_swap_groups(
    scopes text[], keys text[], wins text[], quotas text[],
    had_starts bigint[], had_ends bigint[], had_useds bigint[], had_untils bigint[],
    starts bigint[], ends bigint[], useds bigint[], untils bigint[], groups integer[]
) RETURNS integer[] LANGUAGE plpgsql
SET search_path FROM CURRENT SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
SET lock_timeout = '20ms'
AS $$
#variable_conflict use_column
DECLARE
    r record;
    lost integer[] := '{}';
    written integer[];
BEGIN
    -- Each row has to be there, to be locked.
    INSERT INTO tfw_counters
    SELECT r.scope, r.key, r.win, 0, 0, 0, untils[r.i], '', -1
    FROM unnest(scopes, keys, wins) WITH ORDINALITY AS r(scope, key, win, i)
    WHERE had_untils[r.i] < 0 ORDER BY 1, 2, 3
    ON CONFLICT DO NOTHING;
    FOR r IN
        SELECT * FROM unnest(scopes, keys, wins, groups) WITH ORDINALITY
            AS r(scope, key, win, grp, i)
    LOOP
        CONTINUE WHEN r.grp = ANY (lost);
        -- The lock shows the last version of a row, not that of the statement's snapshot.
        PERFORM FROM tfw_counters t
        WHERE t.scope = r.scope AND t.key = r.key AND t.win = r.win
            AND CASE WHEN had_untils[r.i] < 0 THEN t.place < 0
                ELSE t.place > 0 AND t.start_ms = had_starts[r.i] AND t.end_ms = had_ends[r.i]
                    AND t.used = had_useds[r.i] AND t.until_ms = had_untils[r.i] END
        FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            lost := lost || r.grp;
        END IF;
    END LOOP;
    WITH w AS (
        INSERT INTO tfw_counters AS t
        SELECT r.scope, r.key, r.win, starts[r.i], ends[r.i], useds[r.i], untils[r.i], r.quota, r.i
        FROM unnest(scopes, keys, wins, quotas, groups) WITH ORDINALITY
            AS r(scope, key, win, quota, grp, i)
        WHERE NOT r.grp = ANY (lost)
        ON CONFLICT (key, scope, win) DO UPDATE SET start_ms = excluded.start_ms,
            end_ms = excluded.end_ms, used = excluded.used, until_ms = excluded.until_ms,
            quota = excluded.quota, place = excluded.place
        RETURNING t.place
    )
    SELECT array_agg(w.place) INTO written FROM w;
    RETURN written;
END $$;
