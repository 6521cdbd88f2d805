package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

const apiService = "10.96.0.1"

// resolver asks one server over one protocol.
func resolver(from dialer, network, server string) *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return from.Dial(ctx, network, server)
	}}
}

// dnsServer is the address of a pod of CoreDNS.
func dnsServer(t *testing.T, s *stage) string {
	t.Helper()
	api, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	servers, err := api.CoreV1().Pods(cluster.Namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "k8s-app=kube-dns"})
	if err != nil || len(servers.Items) == 0 {
		t.Fatalf("%d pods of CoreDNS, error %v", len(servers.Items), err)
	}
	return servers.Items[0].Status.PodIP
}

func testDNS(t *testing.T, s *stage) {
	for _, server := range []string{dnsServer(t, s), serviceDNS} {
		for _, from := range clients(s.standing) {
			for _, network := range []string{"udp", "tcp"} {
				asker := resolver(from, network, net.JoinHostPort(server, "53"))
				// Where it is not the cache any more that answers, that takes a moment.
				err := cluster.Poll(within(t, answerLimit), fmt.Sprintf("%s asks %s over %s", from.name, server, network), func(ctx context.Context) error {
					ctx, cancel := context.WithTimeout(ctx, time.Second)
					defer cancel()
					return resolves(ctx, asker, clusterName, netip.MustParseAddr(apiService))
				})
				if err != nil {
					t.Error(err)
				}
			}
		}
	}
}

// A process in a pod, of its node's network too, finds a Service by its name, as programs do.
func testServicesByName(t *testing.T, s *stage) {
	addService(t, s.standing, "near", nil)
	concurrently(slices.Concat([]*cluster.Pod{s.client, s.far}, s.hosts), func(pod *cluster.Pod) {
		for _, name := range []string{"kubernetes.default:443", "near:80"} {
			err := cluster.Poll(within(t, stepLimit), pod.Name+" connects to "+name, func(ctx context.Context) error {
				out, err := s.Kubectl(ctx, "exec", pod.Name, "--", "/agnhost", "connect", "--timeout=2s", name)
				if err != nil {
					return fmt.Errorf("%w: %s", err, out)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		}
	})
}

func testHeadlessService(t *testing.T, s *stage) {
	addService(t, s.standing, "headless", func(spec *core.ServiceSpec) {
		ofAll(spec)
		spec.Type, spec.ClusterIP = core.ServiceTypeClusterIP, core.ClusterIPNone
	})
	want := []string{s.client.Addr.String(), s.near.Addr.String(), s.far.Addr.String()}
	slices.Sort(want)
	for _, from := range clients(s.standing) {
		err := cluster.Poll(within(t, stepLimit), from.name+" finds all pods", func(ctx context.Context) error {
			found, err := resolver(from, "udp", "10.96.0.10:53").LookupHost(ctx, "headless.default.svc.cluster.local.")
			if slices.Sort(found); !slices.Equal(found, want) {
				return fmt.Errorf("%v, want %v, error %w", found, want, err)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// The API server's endpoint is no pod's: it is on a node, another one's for half of the clients.
func testAPIServerByItsService(t *testing.T, s *stage) {
	for _, from := range clients(s.standing) {
		if err := askAPI(within(t, answerLimit), s.standing, from); err != nil {
			t.Errorf("%s to the API server by its Service: %v", from.name, err)
		}
	}
}

// askAPI asks the API server whether it is ready, as a pod does that trusts the cluster's authority.
func askAPI(ctx context.Context, s *standing, from dialer) error {
	authority, err := os.ReadFile(s.Authority())
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority)
	_, err = fetch(ctx, from, &tls.Config{RootCAs: roots}, "https://"+apiService+"/readyz", http.StatusOK)
	return err
}
