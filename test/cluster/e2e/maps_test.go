package e2e

import (
	"context"
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// dump is a map of a node as ebpfctl prints it.
func dump(t *testing.T, s *standing, node *cluster.Machine, name string) []map[string]any {
	t.Helper()
	out, err := ebpfctl(t.Context(), s.Cluster, node, "dump", name, "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	var records []map[string]any
	if err := json.Unmarshal([]byte(out), &records); err != nil {
		t.Fatalf("%s of %s: %v\n%s", name, node.Name, err, out)
	}
	return records
}

// endpoints are the addresses of pods that a node's programs know, in order.
func endpoints(t *testing.T, s *standing, node *cluster.Machine) []netip.Addr {
	t.Helper()
	var all []netip.Addr
	for _, record := range dump(t, s, node, "endpoints") {
		text, _ := record["address"].(string)
		addr, err := netip.ParseAddr(text)
		if err != nil {
			t.Fatalf("an endpoint of %s: %v: %v", node.Name, err, record)
		}
		all = append(all, addr)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all
}

// podsOn are the addresses of a node's pods as the API has them, in order.
func (s *standing) podsOn(ctx context.Context, node *cluster.Machine) ([]netip.Addr, error) {
	client, err := s.Client()
	if err != nil {
		return nil, err
	}
	pods, err := client.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node.Name})
	if err != nil {
		return nil, err
	}
	var all []netip.Addr
	for _, pod := range pods.Items {
		if pod.Spec.HostNetwork {
			continue
		}
		addrs, err := cluster.Addresses(&pod)
		if err != nil {
			return nil, err
		}
		all = append(all, addrs...)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all, nil
}

// unforeseenDrops are the packets, by reason, that the programs of all nodes have dropped for other reasons than that a
// pod's kernel speaks IPv6 by itself.
func unforeseenDrops(t *testing.T, s *standing) map[string]float64 {
	t.Helper()
	all := map[string]float64{}
	for _, node := range s.Nodes {
		maps.Copy(all, dropsOn(t, s, node))
	}
	return all
}

// dropsOn are those of one node.
func dropsOn(t *testing.T, s *standing, node *cluster.Machine) map[string]float64 {
	t.Helper()
	all := map[string]float64{}
	for _, record := range dump(t, s, node, "drops") {
		reason, named := record["reason"].(string)
		packets, counted := record["packets"].(float64)
		if !named || !counted {
			t.Fatalf("drops of %s has a record without reason or packets: %v", node.Name, record)
		}
		if reason != "LINK_SCOPE" {
			all[node.Name+" "+reason] += packets
		}
	}
	return all
}
