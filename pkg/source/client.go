package source

import (
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
)

// group is a group of the API in one version.
type group struct {
	path    string
	version schema.GroupVersion
	types   func(*runtime.Scheme) error
}

// The groups of what is followed.
var (
	core       = group{"/api", corev1.SchemeGroupVersion, corev1.AddToScheme}
	discovery  = group{"/apis", discoveryv1.SchemeGroupVersion, discoveryv1.AddToScheme}
	networking = group{"/apis", networkingv1.SchemeGroupVersion, networkingv1.AddToScheme}
)

// NewClient makes a client of the API that knows the group core/v1 alone: client-go's own clients bring all groups along, which were a third of
// the agent. It asks the API for nothing yet.
func NewClient(config *rest.Config) (*rest.RESTClient, error) { return newClient(config, core) }

func newClient(config *rest.Config, of group) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	if err := of.types(scheme); err != nil {
		return nil, fmt.Errorf("prepare a client of the Kubernetes API: %w", err)
	}
	c := rest.CopyConfig(config)
	c.APIPath, c.GroupVersion = of.path, &of.version
	c.NegotiatedSerializer = lean{serializer.NewCodecFactory(scheme).WithoutConversion()}
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return leanLists{next} })
	client, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("prepare a client of the Kubernetes API: %w", err)
	}
	return client, nil
}
