package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	admission "k8s.io/api/admissionregistration/v1"
	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

const (
	webhookPort = 8443
	// A secret with a webhook's certificate; where the pod has it.
	certSecret, certDir = "webhook-cert", "/etc/webhook"
	// judgeLabel says whom the API server asks about an object.
	judgeLabel = "judge"
)

// The API server asks pods, by their Services, whether an object may be: one beside it and one on the other node.
func testWebhooks(t *testing.T, s *stage) {
	pods := []*cluster.Pod{s.near, s.far} // where the webhooks are
	var names, hosts []string
	for _, beside := range pods {
		names = append(names, "webhook-"+beside.Name)
		hosts = append(hosts, "webhook-"+beside.Name+".default.svc")
	}
	authority := addCertificate(t, s, hosts)
	t.Cleanup(func() {
		if err := s.DeletePods(context.Background(), &cluster.Pod{Name: names[0]}, &cluster.Pod{Name: names[1]}); err != nil {
			t.Error(err)
		}
	})
	at := map[string]service{}
	for _, name := range names {
		at[name] = addService(t, s.standing, name, func(spec *core.ServiceSpec) {
			spec.Type = core.ServiceTypeClusterIP
			spec.Ports = []core.ServicePort{{Port: 443, TargetPort: intstr.FromInt32(webhookPort)}}
		})
	}
	concurrently(pods, func(beside *cluster.Pod) {
		name := "webhook-" + beside.Name
		_, err := s.AddPodWith(t.Context(), name, beside.Node, labelled(name), webhook)
		if err == nil {
			err = connects(within(t, stepLimit), s.Nodes[0], net.JoinHostPort(at[name].Spec.ClusterIP, "443"))
		}
		if err != nil {
			t.Error(err)
		}
	})
	if t.Failed() {
		return
	}
	register(t, s, names, authority)
	concurrently(names, func(name string) { judges(t, s, name) })
}

// Whoever may asks a Service over the API server.
func testByTheAPIServer(t *testing.T, s *stage) {
	for _, backend := range []*cluster.Pod{s.near, s.far} {
		name := "proxied-" + backend.Name
		addService(t, s.standing, name, behind(backend.Name))
		err := cluster.Poll(within(t, stepLimit), "the API server asks "+name, func(ctx context.Context) error {
			got, err := s.Kubectl(ctx, "get", "--raw", "/api/v1/namespaces/default/services/"+name+":http/proxy/hostname")
			if err == nil && got != backend.Name {
				err = fmt.Errorf("%q answers", got)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// connects waits until one can.
func connects(ctx context.Context, from dialer, to string) error {
	return cluster.Poll(ctx, "somebody listens at "+to, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		conn, err := fresh{from}.Dial(ctx, "tcp", to)
		if err == nil {
			conn.Close()
		}
		return err
	})
}

// labelled is the label by which a Service finds a pod.
func labelled(name string) map[string]string { return map[string]string{"app": name} }

// webhook makes a pod serve agnhost's webhooks.
func webhook(spec *core.PodSpec) {
	spec.Volumes = []core.Volume{{
		Name: "cert", VolumeSource: core.VolumeSource{Secret: &core.SecretVolumeSource{SecretName: certSecret}},
	}}
	container := &spec.Containers[0]
	container.VolumeMounts = []core.VolumeMount{{Name: "cert", MountPath: certDir}}
	container.Args = []string{
		"webhook", fmt.Sprintf("--port=%d", webhookPort),
		"--tls-cert-file=" + certDir + "/" + core.TLSCertKey, "--tls-private-key-file=" + certDir + "/" + core.TLSPrivateKeyKey,
	}
	container.ReadinessProbe.HTTPGet.Port = intstr.FromInt32(webhookPort)
	container.ReadinessProbe.HTTPGet.Scheme = core.URISchemeHTTPS
}

// addCertificate makes one that signs itself, and the secret that holds it.
func addCertificate(t *testing.T, s *stage, hosts []string) (authority []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	wanted := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: hosts, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true,
	}
	cert, err := x509.CreateCertificate(rand.Reader, wanted, wanted, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	authority = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})
	api, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	secrets := api.CoreV1().Secrets(metav1.NamespaceDefault)
	_, err = secrets.Create(t.Context(), &core.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: certSecret},
		Type:       core.SecretTypeTLS,
		Data: map[string][]byte{
			core.TLSCertKey: authority, core.TLSPrivateKeyKey: pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}),
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := secrets.Delete(context.Background(), certSecret, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	return authority
}

// register has the API server ask each webhook about the ConfigMaps that are labelled with its name, and refuse what it
// can't ask about.
func register(t *testing.T, s *stage, names []string, authority []byte) {
	t.Helper()
	wanted := &admission.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "judges"}}
	for _, name := range names {
		wanted.Webhooks = append(wanted.Webhooks, admission.ValidatingWebhook{
			Name: name + ".ebpf-cni.test", ObjectSelector: &metav1.LabelSelector{MatchLabels: map[string]string{judgeLabel: name}},
			ClientConfig: admission.WebhookClientConfig{
				Service:  &admission.ServiceReference{Namespace: metav1.NamespaceDefault, Name: name, Path: new("/configmaps")},
				CABundle: authority,
			},
			Rules: []admission.RuleWithOperations{{
				Operations: []admission.OperationType{admission.Create},
				Rule:       admission.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"configmaps"}},
			}},
			FailurePolicy: new(admission.Fail), SideEffects: new(admission.SideEffectClassNone),
			TimeoutSeconds: new(int32(5)), AdmissionReviewVersions: []string{"v1"},
		})
	}
	api, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	webhooks := api.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	if _, err := webhooks.Create(t.Context(), wanted, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := webhooks.Delete(context.Background(), wanted.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
}

// judges waits until a webhook is asked, then has it refuse and admit.
func judges(t *testing.T, s *stage, name string) {
	t.Helper()
	api, err := s.Client()
	if err != nil {
		t.Error(err)
		return
	}
	create := func(ctx context.Context, verdict string) error {
		_, err := api.CoreV1().ConfigMaps(metav1.NamespaceDefault).Create(ctx, &core.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "judged-", Labels: map[string]string{judgeLabel: name}},
			Data:       map[string]string{"webhook-e2e-test": verdict},
		}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	refused := func(ctx context.Context) error {
		err := create(ctx, "webhook-disallow")
		if err == nil || !strings.Contains(err.Error(), name+".ebpf-cni.test\" denied the request") {
			return fmt.Errorf("what it is to refuse: %w", err)
		}
		return nil
	}
	if err := cluster.Poll(within(t, stepLimit), name+" refuses", refused); err != nil {
		t.Error(err)
		return
	}
	for range 5 {
		if err := refused(t.Context()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := create(t.Context(), "harmless"); err != nil {
			t.Errorf("%s: what it is to admit: %v", name, err)
		}
	}
}
