"""Small chat templates of our own whose answers consist of messages: reasoning, text and calls."""

TURNS = """{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.role != 'assistant' %}
{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{% else %}@ANSWER@{% endif %}{% endfor %}
{%- if add_generation_prompt %}@PROMPT@{% endif %}"""
CHANNELS = TURNS.replace("@PROMPT@", "<|start|>assistant").replace(
    "@ANSWER@",
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json"
    "<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% if m.content %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}",
)
RECIPIENTS = TURNS.replace("@PROMPT@", "<|start|>assistant\n>>>").replace(
    "@ANSWER@",
    "<|start|>assistant{{ '\\n' }}{% if m.content %}>>>all{{ '\\n' + m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}>>>{{ c.function.name + '\\n' }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>",
)
# As Solar Open writes calls: a call's id stands before its name.
MESSAGES_WITH_IDS = """{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}
{{- '<|begin|>' + m.role }}{% if m.tool_calls %}<|calls|>
{%- for c in m.tool_calls %}<|call|>{{ c.id }}<|name|>{{ c.function.name }}<|args|>
{{- c.function.arguments | tojson }}<|done|>{% endfor %}{% else %}<|content|>{{ m.content }}{% endif %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|begin|>assistant{% endif %}"""
