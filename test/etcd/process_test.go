package etcd

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// A process keeps its data when it is killed, loses its past when it is compacted, and all when it is emptied.
func TestProcess(t *testing.T) {
	server := Start(t)
	s, client := server.process, server.Client
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	count := func() int64 {
		t.Helper()
		got, err := client.Get(ctx, "/", clientv3.WithPrefix())
		must(err)
		return got.Count
	}
	_, err := client.Put(ctx, "/a", "1")
	must(err)
	if err := s.Start(ctx); err == nil {
		t.Error("started twice")
	}

	must(s.Kill())
	must(s.Kill())
	must(s.Start(ctx))
	if n := count(); n != 1 {
		t.Errorf("%d keys after a kill, want 1", n)
	}

	_, err = client.Put(ctx, "/a", "2")
	must(err)
	must(s.Compact(ctx))
	watch := <-client.Watch(ctx, "/a", clientv3.WithRev(1))
	if err := watch.Err(); !errors.Is(err, rpctypes.ErrCompacted) {
		t.Errorf("a watch from before the compaction ends with %v", err)
	}

	must(s.Empty(ctx))
	if n := count(); n != 0 {
		t.Errorf("%d keys in an emptied server", n)
	}
}
